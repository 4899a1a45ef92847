// Package why has the reasons for which a prefix ends where it does, and remembers which pages are
// gone, and by what.
//
// A lookup ends at the first page that it does not find. Its reason is looked for once, when the
// lookup has ended, so that a lookup that finds everything costs nothing more.
package why

// Reason is why a prefix ends. Metrics, JSON, traces and documents use its name.
type Reason uint8

const (
	End         Reason = iota // the prompt ended: no miss
	NeverStored               // never stored here, as far as is remembered
	Shed                      // its store was held back or dropped, or a tier had no time to take it
	Evicted                   // dropped for room
	Expired                   // found, but its lease ended before vLLM could load it
	Cleared                   // dropped by an operator, or by vLLM's reset of its cache
	OtherSpace                // another space has pages of these hashes
	OtherSeed                 // others name the same prefixes differently
	Late                      // held or promised, but not in time
	EngineHad                 // vLLM's own cache had it
	NotWorth                  // computing it is faster than loading it
	Lost                      // its bytes were bad, or what held it failed

	Reasons = int(iota)
)

var names = [Reasons]string{"end", "never_stored", "shed", "evicted", "expired", "cleared",
	"other_space", "other_seed", "late", "engine_had", "not_worth", "lost"}

func (r Reason) String() string {
	if int(r) < Reasons {
		return names[r]
	}
	return "unknown"
}

// Names returns all names, by Reason. The caller must not change it.
func Names() []string { return names[:] }

// Count is how many prefixes ended for a reason.
type Count struct {
	Ends  uint64 `json:"ends" doc:"Lookups whose prefix ended for this reason."`
	Pages uint64 `json:"pages" doc:"Pages that these lookups asked for and did not find."`
}
