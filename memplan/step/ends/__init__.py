"""A model's ends: its embedding; and its final norm, head and loss, on tape."""
