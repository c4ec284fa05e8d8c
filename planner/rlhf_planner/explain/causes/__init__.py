"""The causes of a slow iteration, one module each; `registry.CAUSES` lists them."""
