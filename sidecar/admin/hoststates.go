package admin

import (
	"context"
	"sync"
)

// A HostState is a sidecar of this host with its status.
type HostState struct {
	HostSidecar
	Status *Status `json:"status"` // nil if it could not be queried
}

// HostStates lists the sidecars of this host as HostSidecars does, with their statuses.
func HostStates(ctx context.Context, dir string) ([]HostState, error) {
	found, err := HostEndpoints(dir)
	if err != nil {
		return nil, err
	}
	all := make([]*HostState, len(found))
	var wg sync.WaitGroup
	for i, dir := range found {
		wg.Go(func() {
			if s, st := askHostSidecar(ctx, dir); s != nil {
				all[i] = &HostState{*s, st}
			}
		})
	}
	wg.Wait()
	out := []HostState{}
	for _, s := range all {
		if s != nil {
			out = append(out, *s)
		}
	}
	return out, nil
}
