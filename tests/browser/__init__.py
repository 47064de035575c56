"""Tests that do what a learner does, in a real browser."""
