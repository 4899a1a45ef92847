package admin

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"unicode"

	"lookaside/ipc/wire"
)

// EngineWeights describes the weights of one engine.
type EngineWeights struct {
	EngineID string   `json:"engine_id" doc:"vLLM's engine_id."`
	Epoch    string   `json:"epoch" doc:"Name of its weights. Empty: those that the field weights of its space names."`
	Ranks    []uint32 `json:"ranks" doc:"First rank of each of its scheduler's sessions here."`
	Spaces   []string `json:"spaces" doc:"Short fingerprint of the space of each of these."`
}

// WeightsResult is the response of GET /v1/weights.
type WeightsResult struct {
	Engines []EngineWeights `json:"engines" doc:"Engines whose scheduler is connected, by their id. One that moves to another epoch is listed once for each."`
}

// NameWeightsRequest is the body of POST /v1/weights.
type NameWeightsRequest struct {
	EngineID string `json:"engine_id,omitempty" maxLength:"1024" doc:"vLLM's engine_id. May be left out while one engine is connected."`
	All      bool   `json:"all,omitempty" doc:"All engines that are connected."`
	Epoch    string `json:"epoch" maxLength:"256" doc:"What the weights are called that the engine has, or is about to have. Empty: they are those that the field weights of its space names."`
}

// NameWeightsResult is the response of POST /v1/weights.
type NameWeightsResult struct {
	Engines []string `json:"engines" doc:"The engines that were told. They go on in the epoch when they next schedule a request."`
}

// Weights lists the weights of the engines that are connected.
func (o *Operations) Weights() WeightsResult {
	out := WeightsResult{Engines: []EngineWeights{}}
	for _, w := range o.Server.Weights() {
		at := slices.IndexFunc(out.Engines, func(e EngineWeights) bool {
			return e.EngineID == w.EngineID && e.Epoch == w.Epoch
		})
		if at < 0 {
			at = len(out.Engines)
			out.Engines = append(out.Engines, EngineWeights{EngineID: w.EngineID, Epoch: w.Epoch})
		}
		e := &out.Engines[at]
		e.Ranks, e.Spaces = append(e.Ranks, w.Rank), append(e.Spaces, w.Space)
	}
	return out
}

// NameWeights tells engines what their weights are called.
func (o *Operations) NameWeights(_ context.Context, r NameWeightsRequest) (NameWeightsResult,
	error) {
	out := NameWeightsResult{Engines: []string{}}
	if strings.ContainsFunc(r.Epoch, func(c rune) bool { return !unicode.IsPrint(c) }) ||
		len(r.Epoch) > wire.MaxEpochBytes {
		return out, apiError(http.StatusBadRequest, fmt.Sprintf(
			"give up to %d bytes of printable text", wire.MaxEpochBytes), "epoch: %q is no name",
			r.Epoch)
	}
	var engines []string
	for _, w := range o.Server.Weights() {
		if !slices.Contains(engines, w.EngineID) {
			engines = append(engines, w.EngineID)
		}
	}
	fix := "connected are: " + strings.Join(engines, ", ")
	if len(engines) == 0 {
		fix = "start vLLM first, or give its setting lookaside.weights_epoch"
	}
	switch {
	case r.All && r.EngineID != "":
		return out, apiError(http.StatusBadRequest, "leave all or engine_id out",
			"it says all engines, and one")
	case r.All:
	case r.EngineID == "" && len(engines) > 1:
		return out, apiError(http.StatusBadRequest, fix,
			"there are %d engines: say which is meant, or all", len(engines))
	case r.EngineID != "" && !slices.Contains(engines, r.EngineID):
		return out, apiError(http.StatusNotFound, fix, "no engine %q is connected", r.EngineID)
	case r.EngineID != "":
		engines = []string{r.EngineID}
	}
	if len(engines) == 0 {
		return out, apiError(http.StatusNotFound, fix, "no engine is connected")
	}
	for _, id := range engines {
		if o.Server.NameWeights(id, r.Epoch) > 0 {
			out.Engines = append(out.Engines, id)
		}
	}
	if len(out.Engines) == 0 {
		return out, apiError(http.StatusServiceUnavailable, "try again",
			"no longer connected: %s", strings.Join(engines, ", "))
	}
	return out, nil
}
