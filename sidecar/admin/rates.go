package admin

import (
	"context"
	"sync"
	"time"

	"lookaside/connector"
)

const (
	// rateWindow is the window of rates. Counters are sampled every rateStep.
	rateWindow = time.Minute
	rateStep   = 5 * time.Second
)

// LastMinute holds the counts of the last minute, or since the start if that is shorter.
type LastMinute struct {
	Seconds     float64              `json:"seconds" doc:"What it covers: a little more than 60, less just after the start."`
	Tokens      connector.TokenCount `json:"tokens"`
	LoadedRatio float64              `json:"loaded_ratio" doc:"Loaded of the tokens asked for; 0 if there were none."`
	Saved       connector.SavedTime  `json:"saved" doc:"As counters.saved, of that time."`
	Lookups     uint64               `json:"lookups"`
	Loads       uint64               `json:"loads"`
	StoredPages uint64               `json:"stored_pages"`
	StoredBytes uint64               `json:"stored_bytes"`
	LoadedBytes uint64               `json:"loaded_bytes"`
	ShedPages   uint64               `json:"shed_pages" doc:"Not stored, for want of room."`
}

// rates keeps samples of the counters for a little more than the last minute. Any goroutine may
// call its methods.
type rates struct {
	mu sync.Mutex
	// oldest first: the newest sample that is a minute old or older, and all younger ones
	noted []noted
}

type noted struct {
	at    time.Time
	count connector.Counters
}

// note adds a sample. at must be later than that of all samples before.
func (r *rates) note(at time.Time, count connector.Counters) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noted = append(r.noted, noted{at, count})
	for len(r.noted) > 1 && at.Sub(r.noted[1].at) >= rateWindow {
		r.noted = r.noted[1:]
	}
}

// last returns the difference between the counters now and a minute ago.
func (r *rates) last(now time.Time, count connector.Counters) LastMinute {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.noted) == 0 {
		return LastMinute{}
	}
	from := r.noted[0]
	for _, n := range r.noted[1:] {
		if now.Sub(n.at) < rateWindow {
			break
		}
		from = n
	}
	was, tokens := from.count, count.Tokens
	tokens.Requests -= was.Tokens.Requests
	tokens.Asked -= was.Tokens.Asked
	tokens.Found -= was.Tokens.Found
	tokens.Loaded -= was.Tokens.Loaded
	tokens.Own -= was.Tokens.Own
	tokens.Computed = tokens.Asked - min(tokens.Loaded, tokens.Asked)
	return LastMinute{
		Seconds: now.Sub(from.at).Seconds(), Tokens: tokens, LoadedRatio: tokens.LoadedRatio(),
		Saved:   count.Saved.Since(was.Saved),
		Lookups: count.Lookups - was.Lookups, Loads: count.Loads - was.Loads,
		StoredPages: count.StoredPages - was.StoredPages,
		StoredBytes: count.StoredBytes - was.StoredBytes,
		LoadedBytes: count.LoadedBytes - was.LoadedBytes,
		ShedPages:   count.ShedPages - was.ShedPages,
	}
}

// watch samples the counters until ctx ends.
func (r *rates) watch(ctx context.Context, counters func() connector.Counters) {
	tick := time.NewTicker(rateStep)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			r.note(now, counters())
		}
	}
}
