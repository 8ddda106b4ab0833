"""Models as users name them: finding, loading, and attaching adapters."""
