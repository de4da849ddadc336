"""Everything that knows megatron-core: process groups, layers, building, sharding, optimizer."""
