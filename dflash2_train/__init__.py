"""Trains, exports, decodes with and evaluates DFlash 2 drafters; README.md beside this file maps the modules."""
