"""What is recorded: nodes, shapes, storages and views, source lines."""
