package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/pprof"
	"path"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"lookaside/sidecar/settings"
)

// output is an answer with a body.
type output[T any] struct{ Body T }

// input is a request with a body.
type input[T any] struct{ Body T }

// textOutput is an answer that is no JSON.
type textOutput struct {
	ContentType string `header:"Content-Type"`
	Body        []byte
}

// A router is a ServeMux that knows what it routes.
type router struct {
	http.ServeMux
	patterns []string
}

// Handle registers a handler.
func (m *router) Handle(pattern string, h http.Handler) {
	m.patterns = append(m.patterns, pattern)
	m.ServeMux.Handle(pattern, h)
}

// HandleFunc registers a function; it implements humago.Mux.
func (m *router) HandleFunc(pattern string, h func(http.ResponseWriter, *http.Request)) {
	m.Handle(pattern, http.HandlerFunc(h))
}

// newAPI makes the routes of d's operations on mux, and /openapi.json, which describes them.
// metrics serves /metrics.
func newAPI(mux *router, o *Operations, metrics http.Handler, token, profiles bool) *huma.OpenAPI {
	cfg := huma.DefaultConfig("Lookaside sidecar", o.Version)
	cfg.Info.Description = "Looks at one sidecar and controls what it keeps where. Answers that are not a success carry what is wrong, and what to do about it."
	cfg.CreateHooks, cfg.DocsPath, cfg.SchemasPath, cfg.OpenAPIPath = nil, "", "", ""
	indented := huma.Format{
		Marshal: func(w io.Writer, v any) error {
			enc := json.NewEncoder(w)
			enc.SetIndent("", "  ")
			return enc.Encode(v)
		},
		Unmarshal: json.Unmarshal,
	}
	cfg.Formats = map[string]huma.Format{"application/json": indented, "json": indented}
	var security []map[string][]string
	if token {
		cfg.Components.SecuritySchemes = map[string]*huma.SecurityScheme{"token": {Type: "http",
			Scheme: "bearer", Description: "The text of admin.token_file. Not needed on the Unix socket admin.sock in runtime.dir."}}
		security = []map[string][]string{{"token": {}}}
	}
	api := humago.New(mux, cfg)
	registry := api.OpenAPI().Components.Schemas
	op := func(method, at, id, summary string, security []map[string][]string) huma.Operation {
		return huma.Operation{
			OperationID: id, Method: method, Path: at, Summary: summary, Security: security,
			DefaultStatus:   http.StatusOK,
			MaxBodyBytes:    MaxBodyBytes(o.Settings.Lookup.MaxPages),
			BodyReadTimeout: 10 * time.Second,
			Metadata:        map[string]any{registryKey: registry},
		}
	}
	get := func(at, id, summary string) huma.Operation {
		return op(http.MethodGet, at, id, summary,
			security)
	}
	post := func(at, id, summary string) huma.Operation {
		return op(http.MethodPost, at, id,
			summary, security)
	}

	ok := func() (*textOutput, error) {
		return &textOutput{"text/plain; charset=utf-8",
			[]byte("ok\n")}, nil
	}
	text := func(o huma.Operation, contentType string) huma.Operation {
		o.Responses = map[string]*huma.Response{"200": {
			Description: "OK",
			Content: map[string]*huma.MediaType{
				contentType: {Schema: &huma.Schema{Type: huma.TypeString}},
			},
		}}
		return o
	}
	huma.Register(api, text(op(http.MethodGet, "/healthz", "health", "Whether the process lives",
		nil), "text/plain"),
		func(context.Context, *struct{}) (*textOutput, error) { return ok() })
	huma.Register(api, text(op(http.MethodGet, "/readyz", "ready",
		"Whether clients are welcome; 503 while draining", nil), "text/plain"),
		func(context.Context, *struct{}) (*textOutput, error) {
			if err := o.ready(); err != nil {
				return nil, apiError(http.StatusServiceUnavailable,
					"ask another sidecar, or this one's successor", "%v", err)
			}
			return ok()
		})
	// Not through the library, which would have to hold the whole text.
	mux.Handle("GET /metrics", metrics)
	document := func(o huma.Operation) {
		api.OpenAPI().AddOperation(&o)
	}
	document(text(get("/metrics", "metrics", "Metrics for Prometheus"), "text/plain"))
	document(text(get("/openapi.json", "openapi", "This document"), "application/json"))
	if profiles {
		for _, p := range profileRoutes {
			mux.HandleFunc("GET "+p.path, p.serve)
			document(text(get(p.path, strings.TrimSuffix("profiles-"+path.Base(p.path), "-pprof"),
				p.what), "application/octet-stream"))
		}
	}

	huma.Register(api, get("/v1/status", "status", "What the sidecar holds and who uses it"),
		func(context.Context, *struct{}) (*output[Status],
			error) {
			return &output[Status]{o.Status()}, nil
		})
	huma.Register(api, get("/v1/tiers", "tiers", "The tiers below the arena, nearest first"),
		func(context.Context, *struct{}) (*output[TiersResult], error) {
			return &output[TiersResult]{TiersResult{o.Tiers()}}, nil
		})
	huma.Register(api, get("/v1/pins", "pins", "Prefixes that are pinned"),
		func(context.Context, *struct{}) (*output[PinsResult], error) {
			return &output[PinsResult]{PinsResult{o.Pins()}}, nil
		})
	registerOperation(api, post("/v1/prefetch", "prefetch",
		"Bring a prefix from the tiers into the arena"), o.Prefetch)
	registerOperation(api, post("/v1/pin", "pin",
		"Keep the part of a prefix that is in the arena from being evicted, until it is unpinned or cleared"), o.Pin)
	registerOperation(api, post("/v1/unpin", "unpin", "End pins"), o.Unpin)
	registerOperation(api, post("/v1/clear", "clear", "Forget what is held"), o.Clear)
	registerOperation(api, post("/v1/move", "move",
		"Move or copy a prefix from one tier to another"), o.Move)
	o.registerDAX(api, get, post)
	mux.HandleFunc("GET /openapi.json", func(w http.ResponseWriter, _ *http.Request) {
		b, err := marshalDocument(api.OpenAPI())
		if err != nil {
			apiError(http.StatusInternalServerError, "report it", "%v", err).write(w)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(b) // who asked may have left
	})
	return api.OpenAPI()
}

// profileRoutes are those that admin.pprof adds.
var profileRoutes = []struct {
	path, what string
	serve      http.HandlerFunc
}{
	{"/debug/pprof/", "List of Go's profiles, which are below it", pprof.Index},
	{"/debug/pprof/cmdline", "The command line", pprof.Cmdline},
	{"/debug/pprof/profile", "A CPU profile of 30 s", pprof.Profile},
	{"/debug/pprof/symbol", "Names of program counters", pprof.Symbol},
	{"/debug/pprof/trace", "An execution trace", pprof.Trace},
}

// MaxBodyBytes has room for the hashes of a prefix of maxPages pages, the longest there is.
func MaxBodyBytes(maxPages int) int64 { return 64<<10 + int64(maxPages)*80 }

// registerOperation makes the route of something that changes what is held.
func registerOperation[In, Out any](api huma.API, op huma.Operation, do func(context.Context,
	In) (Out, error)) {
	huma.Register(api, op, func(ctx context.Context, in *input[In]) (*output[Out], error) {
		if rc, ok := ctx.Value(controllerKey{}).(*http.ResponseController); ok {
			// The body has been read. A deadline for reading would end the request's context while
			// the operation is under way.
			if err := errors.Join(rc.SetReadDeadline(time.Time{}),
				rc.SetWriteDeadline(time.Now().Add(maxTimeoutS*time.Second+
					time.Minute))); err != nil {
				return nil, err
			}
		}
		out, err := do(ctx, in.Body)
		if err != nil {
			return nil, operationError(err)
		}
		return &output[Out]{out}, nil
	})
}

// OpenAPI returns the document that /openapi.json serves, as a sidecar with a token and profiles
// serves it.
func OpenAPI(version string) ([]byte, error) {
	cfg := settings.Defaults()
	o := &Operations{Parts: Parts{Settings: &cfg, Version: version}}
	return marshalDocument(newAPI(new(router), o,
		http.NotFoundHandler(),
		true, true))
}

func marshalDocument(doc *huma.OpenAPI) ([]byte, error) {
	b, err := json.Marshal(doc)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, b, "", "  "); err != nil {
		return nil, err
	}
	return append(out.Bytes(), '\n'), nil
}
