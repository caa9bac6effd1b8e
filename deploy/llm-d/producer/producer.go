// SPDX-License-Identifier: Apache-2.0

// Package producer is a data producer for llm-d's scheduler (llm-d-router): it fills each endpoint's
// PrefixCacheMatchInfo with what hybrid-kv-router says that the endpoint reuses, for the stock prefix-cache-scorer.
//
// Written for llm-d-router v0.10; docs/how-to/llm-d.md says what was checked, and how to build it in.
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
	tokenproducer "github.com/llm-d/llm-d-router/pkg/epp/framework/plugins/requestcontrol/dataproducer/tokenizer"

	"hybrid-kv-router/llm-d/query"
)

const (
	// Type is the producer's name in an EndpointPickerConfig.
	Type = "kvrouter-prefix-producer"
	// Hits are exact to the token, so a block is one: nothing is rounded to a size that hybrid models have not.
	blockSizeTokens = 1
	apiKeyVariable  = "KVROUTER_API_KEY"
)

var (
	_ requestcontrol.DataProducer = &Producer{}
	_ plugin.ConsumerPlugin       = &Producer{}
	_ plugin.FactoryFunc          = Factory
)

// Producer asks once a prompt. A failure leaves the endpoints without the attribute: the scorer gives them 0, and the
// other scorers decide.
type Producer struct {
	name    plugin.TypedName
	key     plugin.DataKey
	client  query.Client
	weights query.Weights
}

// Factory is what plugin.Register takes. Parameters: url (required), tierWeights {gpu, cpu, disk}.
func Factory(name string, parameters *json.Decoder, _ plugin.Handle) (plugin.Plugin, error) {
	given := struct {
		URL         string         `json:"url"`
		TierWeights *query.Weights `json:"tierWeights"`
	}{TierWeights: &query.Weights{}}
	*given.TierWeights = query.DefaultWeights
	if parameters != nil {
		if err := parameters.Decode(&given); err != nil {
			return nil, fmt.Errorf("parameters of %s: %w", Type, err)
		}
	}
	if given.URL == "" || given.TierWeights == nil {
		return nil, fmt.Errorf("%s needs the parameter url, like http://kvrouter.serving.svc", Type)
	}
	return &Producer{
		name:    plugin.TypedName{Type: Type, Name: name},
		key:     attrprefix.PrefixCacheMatchInfoDataKey.WithNonEmptyProducerName(name),
		client:  query.Client{URL: given.URL, APIKey: os.Getenv(apiKeyVariable), HTTP: &http.Client{}},
		weights: *given.TierWeights,
	}, nil
}

// TypedName implements plugin.Plugin.
func (p *Producer) TypedName() plugin.TypedName { return p.name }

// Produces implements plugin.ProducerPlugin; a scorer names the producer in prefixMatchInfoProducerName.
func (p *Producer) Produces() map[plugin.DataKey]any {
	return map[plugin.DataKey]any{p.key: attrprefix.PrefixCacheMatchInfo{}}
}

// Consumes implements plugin.ConsumerPlugin: the token-producer comes first.
func (p *Producer) Consumes() plugin.DataDependencies {
	tokens := map[plugin.DataKey]any{tokenproducer.TokenizedPromptDataKey: scheduling.TokenizedPrompt{}}
	return plugin.DataDependencies{Required: tokens}
}

// Produce implements requestcontrol.DataProducer; ctx has the scheduler's own time limit.
func (p *Producer) Produce(ctx context.Context, request *scheduling.InferenceRequest, endpoints []scheduling.Endpoint) error {
	if request.Body == nil || request.Body.TokenizedPrompt.TokenCount() == 0 {
		return errors.New(Type + ": the request has no tokens; a token-producer must come first")
	}
	tokenized := request.Body.TokenizedPrompt
	worth, reused := map[string]int{}, map[string]int{}
	for number, tokens := range tokenized.PerPromptTokens {
		// Placeholders do not say which image they stand for, so no reuse is claimed from the first one on.
		if number == 0 && len(tokenized.MultiModalFeatures) > 0 {
			tokens = tokens[:tokenized.MultiModalFeatures[0].Offset]
		}
		if len(tokens) == 0 {
			continue
		}
		prompt := query.Prompt{Model: request.TargetModel, TokenIDs: tokens, CacheSalt: tokenized.CacheSalt}
		hits, err := p.client.Hits(ctx, prompt)
		if err != nil {
			return fmt.Errorf("%s: %w", Type, err)
		}
		for worker, hit := range hits {
			worth[worker] += hit.Tokens(p.weights)
			reused[worker] += hit.All()
		}
	}
	for _, endpoint := range endpoints {
		worker := endpoint.GetMetadata().Name
		found := attrprefix.NewPrefixCacheMatchInfo(worth[worker], tokenized.TokenCount(), blockSizeTokens)
		endpoint.Put(p.key.String(), found.WithCachedBlockCount(reused[worker]))
	}
	return nil
}
