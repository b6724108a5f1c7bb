"""Judging a run's answers by training again: do they say what would change?"""
