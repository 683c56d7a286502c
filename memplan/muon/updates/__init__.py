"""One update of one parameter, and where its states are."""
