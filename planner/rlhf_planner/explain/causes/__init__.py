"""The causes of a slow iteration; `registry.CAUSES` lists them."""
