"""Holds plans against compiled programs and against one device."""
