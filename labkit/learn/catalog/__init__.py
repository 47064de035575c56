"""The exercises of each lesson, one module a lesson, with the wrong answers that their checks reject."""
