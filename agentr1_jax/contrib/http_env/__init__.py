"""Tasks over HTTP: the client is a Task, the server serves any Task."""
