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

// output is a response with a JSON body.
type output[T any] struct{ Body T }

// input is a request with a body.
type input[T any] struct{ Body T }

// textOutput is a response that is not JSON.
type textOutput struct {
	ContentType string `header:"Content-Type"`
	Body        []byte
}

// A router is a ServeMux that can list its patterns.
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

// api registers routes. Those of operators require the token, if one is set.
type api struct {
	huma.API
	o        *Operations
	mux      *router
	security []map[string][]string // nil: no token is required
}

// newAPI adds the routes of the operations to mux, and /openapi.json, which describes them. metrics
// serves /metrics.
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
	a := &api{o: o, mux: mux}
	if token {
		cfg.Components.SecuritySchemes = map[string]*huma.SecurityScheme{"token": {Type: "http",
			Scheme: "bearer", Description: "The text of admin.token_file. Not needed on the Unix socket admin.sock in runtime.dir."}}
		a.security = []map[string][]string{{"token": {}}}
	}
	a.API = humago.New(mux, cfg)
	a.registerProbes()
	a.registerPage()
	a.registerTexts(metrics, profiles)
	a.registerOperations()
	a.registerDAX()
	return a.OpenAPI()
}

// operation describes a route.
func (a *api) operation(method, at, id, summary string) huma.Operation {
	return huma.Operation{
		OperationID: id, Method: method, Path: at, Summary: summary, Security: a.security,
		DefaultStatus:   http.StatusOK,
		MaxBodyBytes:    MaxBodyBytes(a.o.Settings.Lookup.MaxPages),
		BodyReadTimeout: 10 * time.Second,
		Metadata:        map[string]any{registryKey: a.OpenAPI().Components.Schemas},
	}
}

func (a *api) get(at, id, summary string) huma.Operation {
	return a.operation(http.MethodGet, at, id, summary)
}

func (a *api) post(at, id, summary string) huma.Operation {
	return a.operation(http.MethodPost, at, id, summary)
}

// text describes a route whose response is not JSON.
func text(o huma.Operation, contentType string) huma.Operation {
	o.Responses = map[string]*huma.Response{"200": {
		Description: "OK",
		Content: map[string]*huma.MediaType{
			contentType: {Schema: &huma.Schema{Type: huma.TypeString}},
		},
	}}
	return o
}

// registerProbes adds the routes that require no token.
func (a *api) registerProbes() {
	probe := func(at, id, summary string) huma.Operation {
		o := text(a.get(at, id, summary), "text/plain")
		o.Security = nil
		return o
	}
	says := func(text string) (*textOutput, error) {
		return &textOutput{"text/plain; charset=utf-8", []byte(text + "\n")}, nil
	}
	huma.Register(a, probe("/healthz", "health", "Whether the process lives"),
		func(context.Context, *struct{}) (*textOutput, error) { return says("ok") })
	huma.Register(a, probe("/readyz", "ready", "Whether clients are welcome; 503 while draining. The text is ok, or says that the arena is still being prepared"),
		func(context.Context, *struct{}) (*textOutput, error) {
			if err := a.o.ready(); err != nil {
				return nil, apiError(http.StatusServiceUnavailable,
					"ask another sidecar, or this one's successor", "%v", err)
			}
			return says(a.o.arenaState())
		})
}

// registerTexts adds the routes that do not use the library, which would hold the whole text of
// metrics in memory.
func (a *api) registerTexts(metrics http.Handler, profiles bool) {
	document := func(o huma.Operation) { a.OpenAPI().AddOperation(&o) }
	a.mux.Handle("GET /metrics", metrics)
	document(text(a.get("/metrics", "metrics", "Metrics for Prometheus"), "text/plain"))
	a.mux.HandleFunc("GET /openapi.json", func(w http.ResponseWriter, _ *http.Request) {
		b, err := marshalDocument(a.OpenAPI())
		if err != nil {
			apiError(http.StatusInternalServerError, "report it", "%v", err).write(w)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(b) // the client may have left
	})
	document(text(a.get("/openapi.json", "openapi", "This document"), "application/json"))
	a.mux.HandleFunc("GET /v1/record", a.o.record)
	recording := text(a.get("/v1/record", "record",
		"Record the requests until /v1/record/stop: a stream in the form of docs/traces.md"),
		"application/octet-stream")
	recording.Responses["200"].Headers = map[string]*huma.Param{RecordingHeader: {
		Description: "The recording's number.", Schema: &huma.Schema{Type: huma.TypeString}}}
	document(recording)
	if profiles {
		for _, p := range profileRoutes {
			a.mux.HandleFunc("GET "+p.path, p.serve)
			id := strings.TrimSuffix("profiles-"+path.Base(p.path), "-pprof")
			document(text(a.get(p.path, id, p.what), "application/octet-stream"))
		}
	}
}

// registerOperations adds the routes of the operations, except those on devices.
func (a *api) registerOperations() {
	huma.Register(a, a.get("/v1/status", "status", "What the sidecar holds and who uses it"),
		func(context.Context, *struct{}) (*output[Status], error) {
			return &output[Status]{a.o.Status()}, nil
		})
	huma.Register(a, a.get("/v1/tiers", "tiers", "The tiers below the arena, nearest first"),
		func(context.Context, *struct{}) (*output[TiersResult], error) {
			return &output[TiersResult]{TiersResult{a.o.Tiers()}}, nil
		})
	huma.Register(a, a.get("/v1/arena", "arena-map", "What lies where in the arena"),
		func(context.Context, *struct{}) (*output[*ArenaMap], error) {
			return &output[*ArenaMap]{a.o.ArenaMap()}, nil
		})
	a.registerHost()
	huma.Register(a, a.get("/v1/pins", "pins", "Prefixes that are pinned"),
		func(context.Context, *struct{}) (*output[PinsResult], error) {
			return &output[PinsResult]{PinsResult{a.o.Pins()}}, nil
		})
	registerOperation(a, a.post("/v1/prefetch", "prefetch",
		"Bring a prefix from the tiers into the arena"), a.o.Prefetch)
	registerOperation(a, a.post("/v1/pin", "pin",
		"Keep the part of a prefix that is in the arena from being evicted, until it is unpinned or cleared"), a.o.Pin)
	registerOperation(a, a.post("/v1/unpin", "unpin", "End pins"), a.o.Unpin)
	registerOperation(a, a.post("/v1/clear", "clear", "Forget what is held"), a.o.Clear)
	huma.Register(a, a.get("/v1/weights", "weights", "What the weights of the engines are called"),
		func(context.Context, *struct{}) (*output[WeightsResult], error) {
			return &output[WeightsResult]{a.o.Weights()}, nil
		})
	registerOperation(a, a.post("/v1/weights", "name-weights",
		"Tell engines what their weights are called, so that pages of other weights are not found"),
		a.o.NameWeights)
	registerOperation(a, a.post("/v1/why", "why",
		"Say why a request's lookups ended where they did, or why a prefix does now"), a.o.Why)
	huma.Register(a, a.get("/v1/why/reasons", "why-reasons",
		"What the reasons of misses mean, and what to do about each"),
		func(context.Context, *struct{}) (*output[MissReasonsResult], error) {
			return &output[MissReasonsResult]{MissReasonsResult{MissReasons()}}, nil
		})
	registerOperation(a, a.post("/v1/record/stop", "stop-recording", "End a recording"),
		a.o.StopRecording)
	registerOperation(a, a.post("/v1/move", "move",
		"Move or copy a prefix from one tier to another"), a.o.Move)
}

// registerHost adds the routes that show the sidecars of this host.
func (a *api) registerHost() {
	huma.Register(a, a.get("/v1/host", "host", "The sidecars of this user on this host"),
		func(ctx context.Context, _ *struct{}) (*output[HostResult], error) {
			out, err := a.o.Host(ctx)
			return &output[HostResult]{out}, err
		})
	huma.Register(a, a.get("/v1/host/status", "host-status", "/v1/status of a sidecar of this host"),
		func(ctx context.Context, in *neighbourRequest) (*output[Status], error) {
			var out output[Status]
			return &out, a.o.askNeighbour(ctx, in.ID, "/v1/status", nil, &out.Body)
		})
	huma.Register(a, a.get("/v1/host/arena", "host-arena", "/v1/arena of a sidecar of this host"),
		func(ctx context.Context, in *neighbourRequest) (*output[ArenaMap], error) {
			var out output[ArenaMap]
			return &out, a.o.askNeighbour(ctx, in.ID, "/v1/arena", nil, &out.Body)
		})
	huma.Register(a, a.post("/v1/host/why", "host-why", "/v1/why of a sidecar of this host"),
		func(ctx context.Context, in *neighbourWhy) (*output[WhyResult], error) {
			var out output[WhyResult]
			return &out, a.o.askNeighbour(ctx, in.ID, "/v1/why", &in.Body, &out.Body)
		})
}

// profileRoutes are the routes that admin.pprof adds.
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

// MaxBodyBytes returns the limit of a body, which holds the hashes of the longest prefix.
func MaxBodyBytes(maxPages int) int64 { return 64<<10 + int64(maxPages)*80 }

// registerOperation adds the route of an operation that changes what is held.
func registerOperation[In, Out any](api huma.API, op huma.Operation, do func(context.Context,
	In) (Out, error)) {
	huma.Register(api, op, func(ctx context.Context, in *input[In]) (*output[Out], error) {
		if rc, ok := ctx.Value(controllerKey{}).(*http.ResponseController); ok {
			// The body was read already. A read deadline would end the request's context while the
			// operation is under way.
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

// OpenAPI returns the document that a sidecar with a token and profiles serves at /openapi.json.
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
