"""Pipeline stages whose modules are Megatron-core's: what they are built by, and how weights get in and out of them."""
