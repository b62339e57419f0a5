"""Stores that have one fault each, and the property of the exam that each must be caught by."""

from __future__ import annotations

from tests.testing import broken_answers, broken_media, broken_meetings
from tests.testing.caught_by import CAUGHT_BY

SaysItForgets = broken_media.SaysItForgets

__all__ = ["CAUGHT_BY", "SaysItForgets", "broken_answers", "broken_media", "broken_meetings"]
