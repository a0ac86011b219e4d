"""Commands that find, measure and rehearse parts of programs, and keep what was measured."""
