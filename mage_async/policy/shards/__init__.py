"""A model that lies on several ranks: digested, published and saved from the shards of each."""
