"""Where calls into users' classes are made: threads, an event loop, and processes of their own."""
