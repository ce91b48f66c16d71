"""Several session servers behind one address: a front and its shards. Start with `front`, then `shard`."""
