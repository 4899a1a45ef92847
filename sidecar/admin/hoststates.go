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

// HostStates lists the sidecars of this host in the order of their endpoints. It finds those with
// sockets in this network namespace, wherever their directories are, and those with a directory
// below dir. ctx bounds the wait for each.
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

// HostStates lists the sidecars of the host of the sidecar that c asks, as that one sees them. ctx
// bounds the wait for all.
func (c *Client) HostStates(ctx context.Context) ([]HostState, error) {
	var host HostResult
	if err := c.Get(ctx, "/v1/host", &host); err != nil {
		return nil, err
	}
	out := make([]HostState, len(host.Sidecars))
	var wg sync.WaitGroup
	for i, n := range host.Sidecars {
		out[i] = HostState{HostSidecar: n.HostSidecar}
		if n.Error != "" {
			continue
		}
		path := "/v1/status"
		if n.ID != host.Self {
			path = "/v1/host/status?id=" + n.ID
		}
		wg.Go(func() {
			var st Status
			if err := c.Get(ctx, path, &st); err != nil {
				out[i].Error = err.Error()
				return
			}
			out[i].Status = &st
		})
	}
	wg.Wait()
	return out, nil
}
