package admin

import (
	"slices"

	"lookaside/tiers/why"
)

// MissReason is a reason why prefixes end before all of a prompt is found.
type MissReason struct {
	Reason string `json:"reason" doc:"As in misses of the status."`
	Means  string `json:"means" doc:"What happened to the pages that were missed."`
	Fix    string `json:"fix" doc:"What to do; empty: it is as it should be."`
}

// MissReasonsResult is the response of GET /v1/why/reasons.
type MissReasonsResult struct {
	Reasons []MissReason `json:"reasons"`
}

// missReasons has the reasons in the order of package why. The dashboard, lookaside top and
// lookaside doctor show them.
var missReasons = []MissReason{
	{why.NeverStored.String(), "were never stored here",
		"new prompts are computed once; if prompts do repeat, see that the instances " +
			"share (lookaside doctor says it), and that requests do not differ in salt, " +
			"adapter or system prompt"},
	{why.Shed.String(), "were to be stored, and were not for want of room",
		"raise arena.limit, or sessions.share if one engine is alone on the sidecar"},
	{why.Evicted.String(), "were evicted for room",
		"raise arena.limit, or add a disk tier (--disk DIR:SIZE); lookaside simulate says " +
			"how much would help"},
	{why.Expired.String(), "were found, and vLLM loaded them too late",
		"requests wait long in vLLM's queue: raise lookup.lease, or give vLLM fewer at a " +
			"time"},
	{why.Cleared.String(), "were cleared",
		"see who clears: lookaside clear, resets of vLLM with reset_external, new weights"},
	{why.OtherSpace.String(), "are there in another space",
		"the instances differ in a setting: lookaside doctor names it"},
	{why.OtherSeed.String(), "are named otherwise by other instances",
		"start all with the same PYTHONHASHSEED, such as PYTHONHASHSEED=0, and the same " +
			"--prefix-caching-hash-algo"},
	{why.Late.String(), "were in a tier, and not up in time",
		"use a faster tier, or raise lookaside.promotion_timeout_ms and the tier's " +
			"load_timeout"},
	{why.EngineHad.String(), "were in vLLM's own cache",
		""},
	{why.NotWorth.String(), "are computed faster than they are loaded",
		"nothing is wrong; a faster tier would change it (lookup.promote)"},
	{why.Lost.String(), "were lost: a wrong checksum, or a tier that failed",
		"look at the sidecar's log and at lookaside tiers for the device that fails"},
}

// MissReasons returns all reasons for misses, in the order of package why.
func MissReasons() []MissReason { return slices.Clone(missReasons) }

// missFix returns what to do about a reason; empty: nothing.
func missFix(r why.Reason) string {
	for _, m := range missReasons {
		if m.Reason == r.String() {
			return m.Fix
		}
	}
	return ""
}
