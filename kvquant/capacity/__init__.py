"""Plans a KV cache before anyone rents a GPU: pure arithmetic on a config, without torch."""
