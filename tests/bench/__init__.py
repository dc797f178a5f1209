"""Measurements to run by hand; no tests."""
