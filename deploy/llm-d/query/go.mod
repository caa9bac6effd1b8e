module hybrid-kv-router/llm-d/query

go 1.19
