"""ZeroMQ sockets between the learner and its peers (actors and evaluators), and CURVE keys."""
