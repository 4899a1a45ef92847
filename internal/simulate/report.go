package simulate

import (
	"fmt"
	"strconv"
)

// A Report holds the results of a plan as `lookaside simulate --format json` prints them.
type Report struct {
	Traces  []TraceReport `json:"traces"`
	Results []Outcome     `json:"results"` // in the order of Plan.Run
}

// A TraceReport describes a trace.
type TraceReport struct {
	Name     string  `json:"name"`
	Requests int     `json:"requests"`
	Blocks   int     `json:"blocks"`
	Distinct int     `json:"distinct_blocks"`
	Ceiling  float64 `json:"ceiling"` // hit ratio of a cache that never evicts
	// Recorded is nil for traces that are no recordings.
	Recorded *Recorded `json:"recorded,omitempty"`
}

// An Outcome is a result with its ratio. Of a recording it has the sizes in bytes as well.
type Outcome struct {
	Result
	Ratio       float64 `json:"hit_ratio"`
	MemoryBytes int64   `json:"memory_bytes,omitempty"`
	TierBytes   int64   `json:"tier_bytes,omitempty"`
}

// Add adds a plan's results to the report.
func (report *Report) Add(plan Plan, results []Result) {
	chunk := map[string]int64{}
	for _, t := range plan.Traces {
		blocks, distinct := t.Blocks()
		report.Traces = append(report.Traces, TraceReport{t.Name, t.Requests(), blocks, distinct,
			t.Ceiling(), t.Recorded()})
		chunk[t.Name] = t.ChunkBytes()
	}
	for _, r := range results {
		bytes := chunk[r.Trace]
		report.Results = append(report.Results, Outcome{r, r.Ratio(), int64(r.Capacity) * bytes,
			int64(r.Tier) * bytes})
	}
}

// FormatBlocks returns a number of blocks in the form of capacities: 500, 10k, 2.5k, 1m.
func FormatBlocks(n int) string {
	for _, unit := range []struct {
		size int
		name string
	}{{1_000_000, "m"}, {1_000, "k"}} {
		if n >= unit.size && n%(unit.size/10) == 0 {
			return strconv.FormatFloat(float64(n)/float64(unit.size), 'f', -1, 64) + unit.name
		}
	}
	return fmt.Sprint(n)
}
