// SPDX-License-Identifier: Apache-2.0

package query

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"
)

// What tests/system/test_llm_d.py says of a router that runs, and of what its replicas then reused.
type fleet struct {
	URL    string         `json:"url"`
	APIKey string         `json:"api_key"`
	Model  string         `json:"model"`
	Tokens []uint32       `json:"tokens"`
	Reused map[string]int `json:"reused"`
}

func running(t *testing.T) fleet {
	var given fleet
	text := os.Getenv("KVROUTER_LLM_D_FLEET")
	if text == "" {
		t.Skip("tests/system/test_llm_d.py starts a router for this test")
	}
	if err := json.Unmarshal([]byte(text), &given); err != nil {
		t.Fatal(err)
	}
	return given
}

func TestHitsAreWhatTheReplicasReuse(t *testing.T) {
	fleet := running(t)
	client := Client{URL: fleet.URL, APIKey: fleet.APIKey, HTTP: http.DefaultClient}
	hits, err := client.Hits(context.Background(), Prompt{Model: fleet.Model, TokenIDs: fleet.Tokens})
	if err != nil {
		t.Fatal(err)
	}
	if len(hits) != len(fleet.Reused) {
		t.Fatalf("hits of %v, wanted those of %v", hits, fleet.Reused)
	}
	for worker, reused := range fleet.Reused {
		hit := hits[worker]
		if all := hit.Tokens(Weights{1, 1, 1}); all != reused || hit.All() != reused || hit.State != "live" {
			t.Errorf("%s: %+v makes %d, and %d were reused", worker, hit, all, reused)
		}
	}
}

func TestAnErrorSaysWhatTheRouterSays(t *testing.T) {
	fleet := running(t)
	client := Client{URL: fleet.URL, HTTP: http.DefaultClient}
	for key, wanted := range map[string]string{"": "401", fleet.APIKey: "no-such-model"} {
		client.APIKey = key
		_, err := client.Hits(context.Background(), Prompt{Model: "no-such-model", TokenIDs: fleet.Tokens})
		if err == nil || !strings.Contains(err.Error(), wanted) {
			t.Errorf("%v does not say %s", err, wanted)
		}
	}
}

func TestATierIsWorthWhatItsWeightSays(t *testing.T) {
	for _, one := range []struct {
		hit    Hit
		wanted int
	}{
		{Hit{GPU: 64, CPU: 192, Disk: 192}, 166},
		{Hit{GPU: 64, CPU: 64, Disk: 264}, 164},
		{Hit{GPU: 64}, 64},
		{Hit{}, 0},
	} {
		if got := one.hit.Tokens(DefaultWeights); got != one.wanted {
			t.Errorf("%+v: %d, wanted %d", one.hit, got, one.wanted)
		}
	}
}
