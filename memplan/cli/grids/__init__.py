"""Options of jobs whose model is divided among GPUs."""
