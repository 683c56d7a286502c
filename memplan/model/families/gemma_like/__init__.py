"""The Gemma generations, and a family whose layers alternate between windows and full attention as theirs do."""
