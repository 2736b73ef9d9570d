"""Procedurally generated tasks with checkable answers; nothing is downloaded."""

from . import arithmetic, grids, lists
from .base import Example, Task

TASKS: dict[str, Task] = {
    task.name: task for task in (*arithmetic.TASKS, *lists.TASKS, *grids.TASKS)
}

__all__ = ["TASKS", "Example", "Task"]
