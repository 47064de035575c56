"""Hints, unfolded one at a time: by a button in JupyterLab, by each call elsewhere."""

from typing import Any

from labkit.learn.exercises import Exercise, UnknownExercise, find_exercise
from labkit.learn.progress import exercise_entry, note_hints
from labkit.learn.surroundings import Place, live, show_text
from labkit.words import _


def hint(exercise_id: str) -> None:
    """Unfold one more hint of an exercise, as `hint("ring")`, and say how many there are.

    In JupyterLab a button unfolds them, so that Run All shows no new one; those seen before stay.
    """
    try:
        exercise = find_exercise(exercise_id)
    except UnknownExercise as error:
        show_text(str(error))
        return
    seen = min(exercise_entry(exercise.id)["hints_seen"], len(exercise.hints))
    if live():
        _offer(exercise, seen)
        return
    seen = min(seen + 1, len(exercise.hints))
    note_hints(exercise.id, exercise.lesson, seen)
    show_text(f"{_heading(exercise, seen)} {_(exercise.hints[seen - 1])}{_after(exercise, seen)}")


def _offer(exercise: Exercise, seen: int) -> None:
    import ipywidgets
    from IPython.display import display

    place = Place(_bundle(exercise, seen))
    if seen >= len(exercise.hints):
        return
    button = ipywidgets.Button(tooltip=_(exercise.title))
    button.layout.width = "auto"

    def label() -> None:
        text = _("Hint {number} of {count}")
        button.description = text.format(number=seen + 1, count=len(exercise.hints))

    def unfold(_button: Any) -> None:
        nonlocal seen
        seen = min(seen + 1, len(exercise.hints))
        note_hints(exercise.id, exercise.lesson, seen)
        place.update(_bundle(exercise, seen))
        if seen < len(exercise.hints):
            label()
        else:
            spot.update({"text/plain": ""}, raw=True)

    label()
    button.on_click(unfold)
    spot: Any = display(button, display_id=True)


def _bundle(exercise: Exercise, seen: int) -> dict[str, str]:
    """All hints seen so far."""
    told = [f"{_heading(exercise, number)} {_(exercise.hints[number - 1])}" for number in range(1, seen + 1)]
    text = "\n\n".join(told) + (_after(exercise, seen) if seen else "")
    return {"text/markdown": text, "text/plain": text}


def _heading(exercise: Exercise, number: int) -> str:
    return f"**{_('Hint {number} of {count}').format(number=number, count=len(exercise.hints))}.**"


def _after(exercise: Exercise, seen: int) -> str:
    if seen < len(exercise.hints):
        return ""
    return "\n\n" + _('That was the last hint; `solution("{id}")` shows a solution.').format(id=exercise.id)
