"""The cluster: workers, routing, HTTP, command line. Its parts are imported by their own names."""
