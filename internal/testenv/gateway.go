package testenv

import (
	"encoding/json"
	"net/http"
	"sync"
)

// Gateway answers /api/kernelspecs as Jupyter Enterprise Gateway does.
type Gateway struct {
	// URL is the gateway's address, without a path.
	URL string

	mu     sync.Mutex
	answer []byte
}

// StartGateway starts a gateway that lists no kernelspec and wants the token,
// where it is not empty.
func StartGateway(t T, token string) *Gateway {
	t.Helper()
	g := &Gateway{}
	g.SetKernels(nil)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/kernelspecs", func(w http.ResponseWriter, req *http.Request) {
		if token != "" && req.Header.Get("Authorization") != "token "+token {
			http.Error(w, `{"reason":"Forbidden","message":"Forbidden"}`, http.StatusForbidden)
			return
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		w.Write(g.answer)
	})
	g.URL = "http://" + startServer(t, mux).host
	return g
}

// SetAnswer makes the gateway answer with these bytes, whatever they are.
func (g *Gateway) SetAnswer(body []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answer = body
}

// SetKernels makes the gateway list one kernelspec per image, named by the
// map's key.
func (g *Gateway) SetKernels(images map[string]string) {
	specs := map[string]json.RawMessage{}
	for name, image := range images {
		specs[name] = Kernelspec(name, image)
	}
	g.SetKernelspecs(specs)
}

// SetKernelspecs makes the gateway list kernelspecs of any shape.
func (g *Gateway) SetKernelspecs(specs map[string]json.RawMessage) {
	body, _ := json.Marshal(map[string]any{"default": "python_kubernetes", "kernelspecs": specs})
	g.SetAnswer(body)
}

// Kernelspec is a kernelspec for Kubernetes in Enterprise Gateway's shape.
func Kernelspec(name, image string) json.RawMessage {
	b, _ := json.Marshal(map[string]any{
		"name": name,
		"spec": map[string]any{
			"argv": []string{
				"python", "/usr/local/share/jupyter/kernels/" + name + "/scripts/launch_kubernetes.py",
				"--RemoteProcessProxy.kernel-id", "{kernel_id}", "--RemoteProcessProxy.response-address", "{response_address}",
			},
			"env":            map[string]string{},
			"display_name":   name,
			"language":       "python",
			"interrupt_mode": "signal",
			"metadata": map[string]any{
				"debugger": true,
				"process_proxy": map[string]any{
					"class_name": "enterprise_gateway.services.processproxies.k8s.KubernetesProcessProxy",
					"config":     map[string]string{"image_name": image},
				},
			},
		},
		"resources": map[string]string{"logo-64x64": "/kernelspecs/" + name + "/logo-64x64.png"},
	})
	return b
}
