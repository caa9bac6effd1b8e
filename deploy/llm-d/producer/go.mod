module hybrid-kv-router/llm-d/producer

go 1.26.6

require (
	github.com/llm-d/llm-d-router v0.10.0
	hybrid-kv-router/llm-d/query v0.0.0
)

replace hybrid-kv-router/llm-d/query => ../query
