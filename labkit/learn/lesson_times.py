"""The first and the last call of a lesson, by which progress knows that it was opened and worked through."""

from labkit.learn.progress import current_lesson, note_lesson, set_lesson


def start_lesson(lesson: str) -> None:
    """Say which lesson this notebook is, as `start_lesson("00")`, and note that it was opened. Shows nothing."""
    if not (isinstance(lesson, str) and lesson.isdigit()):
        raise ValueError(f"start_lesson: a lesson is named by its number, as in '00', not {lesson!r}")
    set_lesson(lesson)
    note_lesson()


def finish_lesson() -> None:
    """Note that the lesson was worked through to its end. Shows nothing."""
    if not current_lesson():
        raise ValueError("finish_lesson: no lesson was started; call start_lesson('00') at the top of the notebook")
    note_lesson(finished=True)
