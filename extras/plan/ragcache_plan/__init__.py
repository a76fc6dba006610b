"""Plans a deployment before it is built: computes sizes and costs, and simulates tiers and eviction policies."""
