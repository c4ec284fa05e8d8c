"""The causes of a slow iteration, a module for each or for a few alike; `registry.CAUSES` lists them."""
