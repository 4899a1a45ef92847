package sidecar

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lookaside/sidecar/settings"
)

// TestOpenEventsAreWarnedAbout: an endpoint that other machines can reach is, unless there is a
// token.
func TestOpenEventsAreWarnedAbout(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		events   settings.EventsConfig
		warnings []string
	}{
		"loopback": {settings.EventsConfig{Endpoint: "tcp://127.0.0.1:*",
			ReplayEndpoint: "tcp://localhost:*"}, nil},
		"bound loopback": {settings.EventsConfig{Endpoint: "tcp://127.0.0.1:0", Bind: "true"}, nil},
		"path": {settings.EventsConfig{Endpoint: "ipc://" + filepath.Join(t.TempDir(), "ev")},
			nil},
		"all addresses": {settings.EventsConfig{Endpoint: "tcp://*:*"},
			[]string{"events.endpoint"}},
		"open replay": {settings.EventsConfig{Endpoint: "tcp://127.0.0.1:*",
			ReplayEndpoint: "tcp://0.0.0.0:0"}, []string{"events.replay_endpoint"}},
		"IPv6": {settings.EventsConfig{Endpoint: "tcp://[::]:*", ReplayEndpoint: "tcp://*:*"},
			[]string{"events.endpoint", "events.replay_endpoint"}},
		"with a token": {settings.EventsConfig{Endpoint: "tcp://*:*", ReplayEndpoint: "tcp://*:*",
			TokenFile: token}, nil},
		// Nobody can reach an endpoint that is connected to.
		"connected": {settings.EventsConfig{Endpoint: "tcp://192.0.2.1:9"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, log := startDaemon(t, func(cfg *settings.Config) {
				cfg.Log.Format = "json"
				cfg.Events.Endpoint, cfg.Events.ReplayEndpoint, cfg.Events.TokenFile =
					c.events.Endpoint, c.events.ReplayEndpoint, c.events.TokenFile
				if c.events.Bind != "" {
					cfg.Events.Bind = c.events.Bind
				}
			})
			var got []string
			for text := range strings.Lines(log.String()) {
				var line struct{ Level, Msg, Setting string }
				if err := json.Unmarshal([]byte(text), &line); err != nil {
					t.Fatal(err)
				}
				if line.Level == "warn" && strings.HasPrefix(line.Msg, "KV events can be read") {
					got = append(got, line.Setting)
				}
			}
			if strings.Join(got, " ") != strings.Join(c.warnings, " ") {
				t.Fatalf("warned about %q, want %q", got, c.warnings)
			}
		})
	}
	for _, bad := range []string{
		"events: {endpoint: 'tcp://127.0.0.1'}", "events: {endpoint: 'udp://x:1'}",
		"events: {bind: maybe}",
		"events: {token_file: /x}", "events: {endpoint: 'tcp://router:5657', token_file: /x}",
	} {
		if _, err := settings.Parse("test", []byte(bad), nil); err == nil ||
			!strings.Contains(err.Error(), "events.") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
