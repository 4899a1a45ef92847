package admin

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"lookaside/internal/bytesize"
)

// A HostSidecar is a sidecar of this host, as `lookaside list` shows it.
type HostSidecar struct {
	Endpoint string  `json:"endpoint"`
	PID      int     `json:"pid"` // 0 if unknown
	Version  string  `json:"version"`
	UptimeS  float64 `json:"uptime_s"`
	Arena    struct {
		UsedBytes     int64 `json:"used_bytes"`
		CapacityBytes int64 `json:"capacity_bytes"`
		LimitBytes    int64 `json:"limit_bytes"`
	} `json:"arena"`
	Verdict string `json:"verdict"` // see Status
	// Error is why the sidecar could not be queried. Then only the endpoint and perhaps the pid are
	// known.
	Error string `json:"error"`
}

// HostEndpoints returns the directories that sidecars of this host may have: those with sockets in
// this network namespace, and those below dir. They are sorted. What was killed may be among them.
func HostEndpoints(dir string) ([]string, error) {
	found, err := listening("/proc/net/unix")
	if err != nil {
		return nil, err
	}
	beside, _ := os.ReadDir(dir) // it may not exist
	for _, e := range beside {
		path := filepath.Join(dir, e.Name())
		if _, err := os.Lstat(filepath.Join(path, socketFile)); err == nil {
			found = append(found, path)
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// listening returns the directories with a listening socket for sessions and one for operators.
func listening(table string) ([]string, error) {
	f, err := os.Open(table)
	if err != nil {
		return nil, fmt.Errorf("the sockets of this host: %w", err)
	}
	defer f.Close()
	const (
		accepting = "00010000" // flags: SO_ACCEPTCON
		stream    = "0001"
		seqpacket = "0005"
	)
	sessions, admins := make(map[string]bool), []string(nil)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// Num RefCount Protocol Flags Type St Inode Path: the inode is padded to a width, and the
		// path may have spaces.
		fields := strings.SplitN(lines.Text(), " ", 7)
		if len(fields) < 7 || fields[3] != accepting {
			continue
		}
		_, path, _ := strings.Cut(strings.TrimLeft(fields[6], " "), " ")
		switch dir, name := filepath.Split(path); {
		case fields[4] == seqpacket && name == sessionSocketFile:
			sessions[dir] = true
		case fields[4] == stream && name == socketFile:
			admins = append(admins, dir)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("the sockets of this host: %w", err)
	}
	var out []string
	for _, dir := range admins {
		if sessions[dir] && filepath.IsAbs(dir) {
			out = append(out, filepath.Clean(dir))
		}
	}
	return out, nil
}

// askHostSidecar returns the state of the sidecar at dir, or nil if none runs there. The second
// result is the sidecar's status, or nil if it could not be queried.
func askHostSidecar(ctx context.Context, dir string) (*HostSidecar, *Status) {
	out := &HostSidecar{Endpoint: dir}
	st, err := FetchStatus(ctx, dir)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil, nil // it was killed
	case errors.Is(err, os.ErrNotExist):
		// It listens, but its directory is not visible here.
		out.Error = "its directory is not visible here: it runs in another container, or its directory was removed"
		return out, nil
	case err != nil:
		out.Error = err.Error()
		if b, err := os.ReadFile(filepath.Join(dir, lockFile)); err == nil {
			out.PID, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		}
		return out, nil
	}
	out.describe(&st)
	return out, &st
}

// describe takes over what a sidecar's status says.
func (s *HostSidecar) describe(st *Status) {
	s.PID, s.Version, s.UptimeS, s.Verdict = st.PID, st.Version, st.UptimeS, st.Verdict
	s.Arena.UsedBytes, s.Arena.CapacityBytes, s.Arena.LimitBytes = st.Arena.UsedBytes,
		st.Arena.CapacityBytes, st.Arena.LimitBytes
}

// WriteSidecars writes sidecars for people.
func WriteSidecars(w io.Writer, list []HostSidecar) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "no sidecar runs on this host")
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "ENDPOINT\tPID\tVERSION\tUP\tARENA\tHOW IT IS")
	for _, s := range list {
		pid, version, up, arena := "?", "?", "?", "?"
		if s.PID > 0 {
			pid = fmt.Sprint(s.PID)
		}
		if s.Error == "" {
			version = s.Version
			up = time.Duration(s.UptimeS * float64(time.Second)).Round(time.Second).String()
			arena = bytesize.Format(s.Arena.UsedBytes) + " of " + bytesize.Format(s.Arena.LimitBytes)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", s.Endpoint, pid, version, up, arena,
			cmp.Or(s.Error, s.Verdict))
	}
	return tw.Flush()
}
