// SPDX-License-Identifier: Apache-2.0

// Package query asks a router of hybrid-kv-router how much of a prompt each worker reuses (POST /query,
// docs/reference/http.md), by tier. It needs nothing beside Go's standard library.
package query

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// An error's text is read no further.
const maxErrorBytes = 4 << 10

// Hit is what one worker reuses of a prompt, in tokens from its beginning. Each tier's number includes the tiers before
// it: with GPU 64 and CPU 192, 128 tokens are loaded from the CPU tier.
type Hit struct {
	GPU  int `json:"gpu"`
	CPU  int `json:"cpu"`
	Disk int `json:"disk"`
	// State is the worker's, and Reason why its credit is withheld; Approximate: an estimate from what was sent there.
	State       string `json:"state"`
	Reason      string `json:"reason"`
	Approximate bool   `json:"approximate"`
}

// Weights say what a token of each tier is worth beside one on the GPU.
type Weights struct {
	GPU  float64 `json:"gpu"`
	CPU  float64 `json:"cpu"`
	Disk float64 `json:"disk"`
}

// DefaultWeights are llm-d's own for GPU and CPU; a disk is slower than both.
var DefaultWeights = Weights{GPU: 1, CPU: 0.8, Disk: 0.5}

// Tokens is the hit in tokens' worth on the GPU, rounded down.
func (h Hit) Tokens(w Weights) int {
	cpu, disk := max(h.CPU-h.GPU, 0), max(h.Disk-max(h.GPU, h.CPU), 0)
	return int(float64(h.GPU)*w.GPU + float64(cpu)*w.CPU + float64(disk)*w.Disk)
}

// All is the hit in tokens, from whichever tier.
func (h Hit) All() int { return max(h.GPU, max(h.CPU, h.Disk)) }

func max(a, b int) int {
	if a > b {
		return a
	}
	return b
}

// Prompt is a prompt as its engine gets it. All of it is part of its blocks' hashes.
type Prompt struct {
	Model     string   `json:"model"`
	TokenIDs  []uint32 `json:"token_ids"`
	CacheSalt string   `json:"cache_salt,omitempty"`
}

// Client asks one router, or the Service of several: all answer alike.
type Client struct {
	URL    string
	APIKey string
	HTTP   *http.Client
}

// Hits returns each worker's hit, by the worker's id; from Kubernetes that is its pod's name.
func (c *Client) Hits(ctx context.Context, prompt Prompt) (map[string]Hit, error) {
	body, err := json.Marshal(prompt)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+"/query", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	if c.APIKey != "" {
		request.Header.Set("Authorization", "Bearer "+c.APIKey)
	}
	answer, err := c.HTTP.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(answer.Body, maxErrorBytes))
		return nil, fmt.Errorf("the router answers %d to /query: %s", answer.StatusCode, text)
	}
	var found struct {
		Instances map[string]Hit `json:"instances"`
	}
	if err := json.NewDecoder(answer.Body).Decode(&found); err != nil {
		return nil, fmt.Errorf("the router's answer to /query: %w", err)
	}
	return found.Instances, nil
}
