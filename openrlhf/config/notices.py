"""Lines for the user that do not stop a run: information, or a caution."""

from __future__ import annotations


class Caution(str):
    """A notice of something that is probably not meant, costs data or shows a secret.

    Shown as a warning; any other notice is information and shown plainly.
    """

    __slots__ = ()
