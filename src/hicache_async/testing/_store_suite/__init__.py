"""The parts of the store exam: candidate.py says what a store declares, exam.py what each check works with.

Each further module is one part of the exam; what it checks are its functions marked ``@check(...)``.
"""
