"""What a job is before a device is looked at: its closed forms by batch and length, and what is refused."""
