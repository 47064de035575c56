"""The exercises of each lesson, one idea a module, with the wrong answers that their checks reject."""
