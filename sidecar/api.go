package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/pprof"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"lookaside/tiers"
	"lookaside/tiers/stack"
)

// APIError is what an admin request gets that does not succeed.
type APIError struct {
	status  int
	Message string `json:"error" doc:"What is wrong."`
	Fix     string `json:"fix" doc:"What to do about it."`
}

// Error implements error.
func (e *APIError) Error() string { return e.Message }

// GetStatus implements huma.StatusError.
func (e *APIError) GetStatus() int { return e.status }

func apiError(status int, fix, format string, args ...any) *APIError {
	return &APIError{status: status, Message: fmt.Sprintf(format, args...), Fix: fix}
}

// seeDocument is the fix where the request itself is wrong.
const seeDocument = "GET /openapi.json says what a request may hold"

func init() {
	// The library makes the errors of what it checks itself through these, and schemas by this.
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError {
		return requestError(nil, status, msg, errs...)
	}
	huma.NewErrorWithContext = requestError
	huma.DefaultArrayNullable = false
}

// requestError describes what the library found wrong with a request, without repeating values.
func requestError(ctx huma.Context, status int, msg string, errs ...error) huma.StatusError {
	e := &APIError{status: status, Message: msg, Fix: seeDocument}
	var parts []string
	for _, err := range errs {
		var d huma.ErrorDetailer
		switch {
		case err == nil:
		case !errors.As(err, &d):
			parts = append(parts, err.Error())
		default:
			detail := d.ErrorDetail()
			parts = append(parts, strings.TrimPrefix(detail.Location+": "+detail.Message, ": "))
			if near := nearestProperty(ctx, detail); near != "" {
				e.Fix = fmt.Sprintf("the nearest name is %q; %s", near, seeDocument)
			}
		}
		if len(parts) == 5 {
			parts = append(parts, "…")
			break
		}
	}
	if len(parts) > 0 {
		e.Message += ": " + strings.Join(parts, "; ")
	}
	switch {
	case status == http.StatusUnsupportedMediaType:
		e.Fix = "send JSON, with the header Content-Type: application/json"
	case status >= 500:
		e.Fix = "look at the sidecar's log"
	}
	return e
}

// nearestProperty is the property that an unknown one of the body was probably meant to be, or "".
func nearestProperty(ctx huma.Context, d *huma.ErrorDetail) string {
	name, inBody := strings.CutPrefix(d.Location, "body.")
	if ctx == nil || !inBody || d.Message != "unexpected property" ||
		ctx.Operation().RequestBody == nil {
		return ""
	}
	var names []string
	for _, media := range ctx.Operation().RequestBody.Content {
		s := media.Schema
		if s != nil && s.Ref != "" {
			s = ctx.Operation().Metadata[registryKey].(huma.Registry).SchemaFromRef(s.Ref)
		}
		if s != nil {
			for p := range s.Properties {
				names = append(names, p)
			}
		}
	}
	slices.Sort(names)
	return nearest(name, names)
}

// registryKey is where an operation's metadata have the registry of schemas.
const registryKey = "registry"

// maxTimeoutS bounds what a request may ask for, and so how long one can occupy a place.
const maxTimeoutS = 600

// A PrefixRequest names a prefix.
type PrefixRequest struct {
	Space  string   `json:"space,omitempty" maxLength:"64" doc:"Fingerprint of the space in hexadecimal, or enough of its beginning to name one of those that are open. May be left out while only one is."`
	Hashes []string `json:"hashes" minItems:"1" doc:"Page hashes in hexadecimal, of the whole prefix from its first page on."`
}

// A TimeoutRequest bounds an operation.
type TimeoutRequest struct {
	TimeoutS float64 `json:"timeout_s,omitempty" minimum:"0.001" maximum:"600" default:"60" doc:"Seconds after which the answer tells how far it got."`
}

func (r TimeoutRequest) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, time.Duration(r.TimeoutS*float64(time.Second)))
}

// PrefetchRequest is the body of POST /v1/prefetch.
type PrefetchRequest struct {
	PrefixRequest
	TimeoutRequest
}

// ProgressResult says how far an operation on a prefix got.
type ProgressResult struct {
	Space      string  `json:"space" doc:"Fingerprint of the space."`
	PagesAsked int     `json:"pages_asked" doc:"Pages that the request names."`
	Pages      int     `json:"pages" doc:"Pages, from the first on, that are where they were wanted."`
	Complete   bool    `json:"complete" doc:"False when the time ran out before the end."`
	Seconds    float64 `json:"seconds" doc:"How long it took."`
}

// PinRequest is the body of POST /v1/pin.
type PinRequest struct {
	PrefixRequest
	TimeoutRequest
	Prefetch bool   `json:"prefetch,omitempty" doc:"Bring what the tiers have into the arena first."`
	Label    string `json:"label,omitempty" maxLength:"200" doc:"What the pin is for; shown with it."`
}

// PinStatus is one pin.
type PinStatus struct {
	Pin        string    `json:"pin" doc:"Its id, for unpinning."`
	Space      string    `json:"space" doc:"Fingerprint of the space."`
	PagesAsked int       `json:"pages_asked" doc:"Pages that the request named."`
	Pages      int       `json:"pages" doc:"Pages, from the first on, that are pinned."`
	Label      string    `json:"label" doc:"As given."`
	Since      time.Time `json:"since" doc:"When it was made."`
}

// PinsResult is the answer of GET /v1/pins.
type PinsResult struct {
	Pins []PinStatus `json:"pins" doc:"Oldest first."`
}

// UnpinRequest is the body of POST /v1/unpin.
type UnpinRequest struct {
	Pin string `json:"pin,omitempty" maxLength:"16" doc:"The id of one pin."`
	All bool   `json:"all,omitempty" doc:"All pins."`
}

// UnpinResult is the answer of POST /v1/unpin.
type UnpinResult struct {
	Unpinned int `json:"unpinned" doc:"Pins that were ended."`
}

// ClearRequest is the body of POST /v1/clear.
type ClearRequest struct {
	TimeoutRequest
	Space     string   `json:"space,omitempty" maxLength:"64" doc:"Fingerprint of the space in hexadecimal; enough of its beginning if it is open."`
	All       bool     `json:"all,omitempty" doc:"All spaces, also those that are not open. This, space or hashes are needed."`
	Hashes    []string `json:"hashes,omitempty" doc:"Page hashes in hexadecimal, of a whole prefix from its first page on: only that is forgotten, and what continues it is not found any more."`
	FirstPage int      `json:"first_page,omitempty" minimum:"0" doc:"With hashes: the first page that is forgotten. Those before it stay, but for what is in one chunk with it."`
	Tier      string   `json:"tier,omitempty" maxLength:"32" doc:"Name of a tier, or arena. Left out: the arena and all tiers."`
}

// ClearResult is the answer of POST /v1/clear.
type ClearResult struct {
	Cleared  []ClearedTier `json:"cleared" doc:"In the order of the tiers, the arena first."`
	Pins     int           `json:"pins" doc:"Pins that ended because what they held was cleared."`
	Complete bool          `json:"complete" doc:"False when the time ran out or a tier failed."`
	Seconds  float64       `json:"seconds" doc:"How long it took."`
}

// ClearedTier says what was cleared of one tier.
type ClearedTier struct {
	Tier   string `json:"tier" doc:"Name of the tier, or arena."`
	Chunks int    `json:"chunks" doc:"Chunks that were dropped; -1 where that cannot be known."`
	Error  string `json:"error" doc:"Why it was not cleared; empty if it was."`
}

// MoveRequest is the body of POST /v1/move.
type MoveRequest struct {
	PrefixRequest
	TimeoutRequest
	From string `json:"from" minLength:"1" maxLength:"32" doc:"Name of the tier to move from."`
	To   string `json:"to" minLength:"1" maxLength:"32" doc:"Name of the tier to move to."`
	Keep bool   `json:"keep,omitempty" doc:"Copy: leave the chunks where they were as well."`
}

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
func newAPI(mux *router, d *Daemon, metrics http.Handler, token, profiles bool) *huma.OpenAPI {
	cfg := huma.DefaultConfig("Lookaside sidecar", Version)
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
			DefaultStatus: http.StatusOK,
			MaxBodyBytes:  maxBodyBytes(d.cfg.Lookup.MaxPages), BodyReadTimeout: 10 * time.Second,
			Metadata: map[string]any{registryKey: registry},
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
			if err := d.ready(); err != nil {
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
			return &output[Status]{d.Status()}, nil
		})
	huma.Register(api, get("/v1/tiers", "tiers", "The tiers below the arena, nearest first"),
		func(context.Context, *struct{}) (*output[TiersResult], error) {
			return &output[TiersResult]{TiersResult{d.Tiers()}}, nil
		})
	huma.Register(api, get("/v1/pins", "pins", "Prefixes that are pinned"),
		func(context.Context, *struct{}) (*output[PinsResult], error) {
			return &output[PinsResult]{PinsResult{d.Pins()}}, nil
		})
	registerOperation(api, post("/v1/prefetch", "prefetch",
		"Bring a prefix from the tiers into the arena"), d.Prefetch)
	registerOperation(api, post("/v1/pin", "pin",
		"Keep the part of a prefix that is in the arena from being evicted, until it is unpinned or cleared"), d.Pin)
	registerOperation(api, post("/v1/unpin", "unpin", "End pins"), d.Unpin)
	registerOperation(api, post("/v1/clear", "clear", "Forget what is held"), d.Clear)
	registerOperation(api, post("/v1/move", "move",
		"Move or copy a prefix from one tier to another"), d.Move)
	d.registerDAX(api, get, post)
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

// maxBodyBytes has room for the hashes of a prefix of maxPages pages, the longest there is.
func maxBodyBytes(maxPages int) int64 { return 64<<10 + int64(maxPages)*80 }

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

// operationError gives an operation's error a status and a fix, unless it has them.
func operationError(err error) error {
	var e *APIError
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, tiers.ErrBusy):
		return apiError(http.StatusServiceUnavailable, "try again in a moment, or ask for less",
			"%v", err)
	case errors.Is(err, stack.ErrOff):
		return apiError(http.StatusServiceUnavailable,
			"GET /v1/tiers says what failed; it is tried again by itself", "%v", err)
	case errors.Is(err, tiers.ErrClosed):
		return apiError(http.StatusServiceUnavailable, "ask this sidecar's successor", "%v", err)
	case errors.Is(err, tiers.ErrInvalid):
		return apiError(http.StatusBadRequest, seeDocument, "%v", err)
	case errors.Is(err, tiers.ErrNotFound), errors.Is(err, tiers.ErrStale):
		return apiError(http.StatusNotFound,
			"GET /v1/status, /v1/tiers and /v1/pins list what there is", "%v", err)
	}
	// By the contract of tiers whatever is left is a failure of a medium or a server.
	return apiError(http.StatusBadGateway,
		"GET /v1/tiers and the sidecar's log say which tier fails", "%v", err)
}

// OpenAPI returns the document that /openapi.json serves, as a sidecar with a token and profiles
// serves it.
func OpenAPI() ([]byte, error) {
	return marshalDocument(newAPI(new(router), &Daemon{cfg: Defaults()}, http.NotFoundHandler(),
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
