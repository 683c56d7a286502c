"""What a card can do, and what the driver and libraries take of it for themselves: data, and the rules that read it."""
