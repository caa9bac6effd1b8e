// SPDX-License-Identifier: Apache-2.0

// Package producer is a data producer for llm-d's scheduler (llm-d-router): it fills each endpoint's
// PrefixCacheMatchInfo with what hybrid-kv-router says that the endpoint reuses, for the stock prefix-cache-scorer.
//
// It was not compiled against llm-d here; docs/how-to/llm-d.md says what was checked, and how to build it in.
package producer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"

	"github.com/llm-d/llm-d-router/pkg/epp/framework/interface/plugin"
	"github.com/llm-d/llm-d-router/pkg/epp/framework/interface/requestcontrol"
	"github.com/llm-d/llm-d-router/pkg/epp/framework/interface/scheduling"
	attrprefix "github.com/llm-d/llm-d-router/pkg/epp/framework/plugins/datalayer/attribute/prefix"

	"hybrid-kv-router/llm-d/query"
)

const (
	// Type is the producer's name in an EndpointPickerConfig.
	Type = "kvrouter-prefix-producer"
	// What llm-d's token-producer writes.
	tokenizedPromptKey = "TokenizedPrompt"
	// Hits are exact to the token, so a block is one: nothing is rounded to a size that hybrid models have not.
	blockSizeTokens = 1
	apiKeyVariable  = "KVROUTER_API_KEY"
)

var _ requestcontrol.DataProducer = &Producer{}

// Producer asks once a request. A failure leaves the endpoints without the attribute: the scorer gives them 0, and the
// other scorers decide.
type Producer struct {
	name    plugin.TypedName
	client  query.Client
	weights query.Weights
}

// Factory is what plugin.Register takes. Parameters: url (required), tierWeights {gpu, cpu, disk}.
func Factory(name string, raw json.RawMessage, _ plugin.Handle) (plugin.Plugin, error) {
	given := struct {
		URL         string         `json:"url"`
		TierWeights *query.Weights `json:"tierWeights"`
	}{TierWeights: &query.Weights{}}
	*given.TierWeights = query.DefaultWeights
	if raw != nil {
		if err := json.Unmarshal(raw, &given); err != nil {
			return nil, fmt.Errorf("parameters of %s: %w", Type, err)
		}
	}
	if given.URL == "" || given.TierWeights == nil {
		return nil, fmt.Errorf("%s needs the parameter url, like http://kvrouter.serving.svc", Type)
	}
	client := query.Client{URL: given.URL, APIKey: os.Getenv(apiKeyVariable), HTTP: &http.Client{}}
	return &Producer{plugin.TypedName{Type: Type, Name: name}, client, *given.TierWeights}, nil
}

// TypedName implements plugin.Plugin.
func (p *Producer) TypedName() plugin.TypedName { return p.name }

// Produces implements plugin.ProducerPlugin.
func (p *Producer) Produces() map[string]any {
	return map[string]any{attrprefix.PrefixCacheMatchInfoKey: attrprefix.PrefixCacheMatchInfo{}}
}

// Consumes implements plugin.ConsumerPlugin: the token-producer comes first.
func (p *Producer) Consumes() map[string]any {
	return map[string]any{tokenizedPromptKey: scheduling.TokenizedPrompt{}}
}

// Produce implements requestcontrol.DataProducer; ctx has the scheduler's own time limit.
func (p *Producer) Produce(ctx context.Context, request *scheduling.InferenceRequest, endpoints []scheduling.Endpoint) error {
	if request.Body == nil || request.Body.TokenizedPrompt == nil || len(request.Body.TokenizedPrompt.TokenIDs) == 0 {
		return errors.New(Type + ": the request has no tokens; a token-producer must come first")
	}
	prompt := request.Body.TokenizedPrompt
	tokens := prompt.TokenIDs
	// Placeholders do not say which image they stand for, so no reuse is claimed from the first one on.
	if len(prompt.MultiModalFeatures) > 0 {
		tokens = tokens[:prompt.MultiModalFeatures[0].Offset]
	}
	hits := map[string]query.Hit{}
	if len(tokens) > 0 {
		asked := query.Prompt{Model: request.TargetModel, TokenIDs: tokens, CacheSalt: request.Body.CacheSalt()}
		var err error
		if hits, err = p.client.Hits(ctx, asked); err != nil {
			return fmt.Errorf("%s: %w", Type, err)
		}
	}
	for _, endpoint := range endpoints {
		matched := hits[endpoint.GetMetadata().PodName].Tokens(p.weights)
		endpoint.Put(attrprefix.PrefixCacheMatchInfoKey,
			attrprefix.NewPrefixCacheMatchInfo(matched, len(prompt.TokenIDs), blockSizeTokens))
	}
	return nil
}
