"""What is handed over and how: chunks, transports, errors. Knows nothing of vLLM or of the cluster."""
