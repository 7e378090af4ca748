"""The run configuration: schema, composition, validation."""
