"""Workers: a vLLM engine in a Ray actor, the KV connector inside it, and the messages between actors."""
